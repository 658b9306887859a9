// Typesets the equations of the reference; without it they are readable as TeX.
for (const place of document.querySelectorAll(".equation")) {
  katex.render(place.textContent, place, { displayMode: true, throwOnError: false });
}
