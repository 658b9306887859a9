"""Retrieval, clustering and verification scores by loops and counting.

S are scores, a row a query and a column a reference; larger = nearer. `itself` says that the references are the
queries, and no query finds itself.
"""

import math

import numpy as np


def scores(X, Y, similarity):
    """Cosine, product or negative distance of each row of X with each row of Y."""
    S = np.zeros((len(X), len(Y)))
    for i in range(len(X)):
        for j in range(len(Y)):
            dot, left, right = (sum(float(a) * float(b) for a, b in zip(p, q, strict=True))
                                for p, q in ((X[i], Y[j]), (X[i], X[i]), (Y[j], Y[j])))  # fmt: skip
            if similarity == "dot":
                S[i, j] = dot
            elif similarity == "cosine":
                S[i, j] = dot / math.sqrt(left * right) if left * right > 0 else 0.0
            else:
                S[i, j] = -math.sqrt(sum((float(a) - float(b)) ** 2 for a, b in zip(X[i], Y[j], strict=True)))
    return S


def ranking(S, i, itself):
    """All references of query i, best first; of equal scores the earlier place first."""
    places = [j for j in range(S.shape[1]) if not (itself and j == i)]
    return sorted(places, key=lambda j: (-S[i, j], j))


def neighbors(S, k, itself):
    """Places [n][k] of the k best."""
    return [ranking(S, i, itself)[:k] for i in range(len(S))]


def relevant(y, ref_y, i, itself):
    """The places that share the class of query i."""
    return [j for j in range(len(ref_y)) if ref_y[j] == y[i] and not (itself and j == i)]


def counted(S, y, ref_y, itself):
    """The queries that have a right answer; the others are lone."""
    return [i for i in range(len(S)) if relevant(y, ref_y, i, itself)]


def rank(S, y, ref_y, i, itself, ties="place"):
    """From 1: where the first right answer of query i stands."""
    right = relevant(y, ref_y, i, itself)
    if ties == "place":
        return next(r for r, j in enumerate(ranking(S, i, itself), start=1) if j in right)
    best = max(S[i, j] for j in right)
    return 1 + sum(1 for j in range(S.shape[1]) if not (itself and j == i) and j not in right and S[i, j] > best)


def recall_at_k(S, y, ref_y, k, itself, ties="place"):
    """Share of the counted queries with a right answer among their k nearest."""
    queries = counted(S, y, ref_y, itself)
    return sum(rank(S, y, ref_y, i, itself, ties) <= k for i in queries) / len(queries)


def reciprocal_rank(S, y, ref_y, itself, ties="place"):
    """Mean of 1 / rank."""
    queries = counted(S, y, ref_y, itself)
    return sum(1 / rank(S, y, ref_y, i, itself, ties) for i in queries) / len(queries)


def r_precision_of(S, y, ref_y, i, itself):
    """Share of right ones among the first R, R their number."""
    right = relevant(y, ref_y, i, itself)
    return sum(j in right for j in ranking(S, i, itself)[: len(right)]) / len(right)


def ap_at_r_of(S, y, ref_y, i, itself):
    """(1/R) sum over i <= R of precision@i where the i-th is right."""
    right = relevant(y, ref_y, i, itself)
    total, hits = 0.0, 0
    for place, j in enumerate(ranking(S, i, itself)[: len(right)], start=1):
        if j in right:
            hits += 1
            total += hits / place
    return total / len(right)


def r_precision(S, y, ref_y, itself):
    """Mean over the counted queries."""
    queries = counted(S, y, ref_y, itself)
    return sum(r_precision_of(S, y, ref_y, i, itself) for i in queries) / len(queries)


def map_at_r(S, y, ref_y, itself):
    """Mean over the counted queries."""
    queries = counted(S, y, ref_y, itself)
    return sum(ap_at_r_of(S, y, ref_y, i, itself) for i in queries) / len(queries)


def related(S, positive, counts, i, ties="place"):
    """(R, rank, R-precision, AP@R) of query i where positive[i, j] says what is right, and counts[i, j] what is there.

    A query without a right answer has R = 0 and nothing else.
    """
    there = [j for j in range(S.shape[1]) if counts[i, j]]
    order = sorted(there, key=lambda j: (-S[i, j], j))
    right = [j for j in there if positive[i, j]]
    if not right:
        return 0, None, None, None
    if ties == "place":
        place = min(order.index(j) for j in right) + 1
    else:
        best = max(S[i, j] for j in right)
        place = 1 + sum(1 for j in there if j not in right and S[i, j] > best)
    first = order[: len(right)]
    precision = [sum(j in right for j in first[:k]) / k for k in range(1, len(first) + 1)]
    hits = [j in right for j in first]
    ap = sum(p for p, hit in zip(precision, hits, strict=True) if hit) / len(right)
    return len(right), place, sum(hits) / len(right), ap


def shared_label(hot, ref_hot):
    """positive[i, j]: whether two rows of 0 and 1 have a 1 in one place."""
    positive = np.zeros((len(hot), len(ref_hot)), dtype=bool)
    for i in range(len(hot)):
        for j in range(len(ref_hot)):
            positive[i, j] = any(a and b for a, b in zip(hot[i], ref_hot[j], strict=True))
    return positive


def pair_f1(found, wanted):
    """F1 of `in one cluster` as a guess of `of one class`, pair by pair."""
    both = clusters = classes = 0
    for i in range(len(found)):
        for j in range(i):
            clusters += found[i] == found[j]
            classes += wanted[i] == wanted[j]
            both += found[i] == found[j] and wanted[i] == wanted[j]
    if both == 0:
        return 0.0
    precision, recall = both / clusters, both / classes
    return 2 * precision * recall / (precision + recall)


def entropy(labels):
    """-sum_c p_c log p_c over the shares p_c of the labels."""
    n = len(labels)
    return -sum(labels.count(c) / n * math.log(labels.count(c) / n) for c in set(labels))


def mutual_information(found, wanted):
    """sum_ij p_ij log(p_ij / (p_i p_j))."""
    n, both = len(found), list(zip(found, wanted, strict=True))
    total = 0.0
    for i, j in set(both):
        share = both.count((i, j)) / n
        total += share * math.log(share / (found.count(i) / n * wanted.count(j) / n))
    return total


def expected_mutual_information(found, wanted):
    """Its mean over all ways to shuffle one of them: the size of each overlap is hypergeometric."""
    n, total = len(found), 0.0
    for i in set(found):
        for j in set(wanted):
            a, b = found.count(i), wanted.count(j)
            for overlap in range(max(1, a + b - n), min(a, b) + 1):
                chance = math.comb(a, overlap) * math.comb(n - a, b - overlap) / math.comb(n, b)
                total += chance * overlap / n * math.log(n * overlap / (a * b))
    return total


def nmi(found, wanted):
    """Mutual information over the mean of the entropies."""
    return mutual_information(found, wanted) / ((entropy(found) + entropy(wanted)) / 2)


def ami(found, wanted):
    """The same, both less what chance gives."""
    chance = expected_mutual_information(found, wanted)
    return (mutual_information(found, wanted) - chance) / ((entropy(found) + entropy(wanted)) / 2 - chance)


def positive_and_negative(S, y):
    """The scores of all unordered pairs of one class, and of two."""
    positive = [S[i, j] for i in range(len(y)) for j in range(i + 1, len(y)) if y[i] == y[j]]
    negative = [S[i, j] for i in range(len(y)) for j in range(i + 1, len(y)) if y[i] != y[j]]
    return positive, negative


def auc(positive, negative):
    """Chance that a positive pair scores above a negative one; a tie is worth a half."""
    wins = sum(1.0 if a > u else 0.5 if a == u else 0.0 for a in positive for u in negative)
    return wins / (len(positive) * len(negative))


def tar_at_far(positive, negative, far):
    """The best share of positive pairs accepted by any threshold that accepts at most a share `far` of negative
    ones.
    """
    best = 0.0
    for threshold in [-math.inf, *positive, *negative]:
        wrong = sum(u > threshold for u in negative) / len(negative)
        if wrong <= far + 1e-12:
            best = max(best, sum(a > threshold for a in positive) / len(positive))
    return best


def judged(run, qrels, query, k):
    """nDCG, MAP, MRR, recall and precision at k of one query; of equal scores the larger document name is first."""
    grades = qrels[query]
    found = run.get(query, {})
    ranked = []
    for document in found:  # insertion sort
        place = 0
        while place < len(ranked) and (found[ranked[place]], ranked[place]) > (found[document], document):
            place += 1
        ranked.insert(place, document)
    gains = [max(0, grades.get(document, 0)) for document in ranked][:k]
    best = sorted((grade for grade in grades.values() if grade > 0), reverse=True)
    dcg, ideal = (sum(g / math.log2(i + 2) for i, g in enumerate(list_[:k])) for list_ in (gains, best))
    precisions = [sum(g > 0 for g in gains[: i + 1]) / (i + 1) for i, gain in enumerate(gains) if gain > 0]
    first = next((i + 1 for i, gain in enumerate(gains) if gain > 0), math.inf)
    hits = sum(gain > 0 for gain in gains)
    return {
        "ndcg": dcg / ideal if best else 0.0,
        "map": sum(precisions) / len(best) if best else 0.0,
        "mrr": 1 / first,
        "recall": hits / len(best) if best else 0.0,
        "precision": hits / k,
    }
