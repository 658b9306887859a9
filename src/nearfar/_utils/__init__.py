"""What several rooms share: checks, files, the terminal, random states, process groups, sums over measures."""
