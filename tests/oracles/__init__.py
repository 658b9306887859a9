"""Slow reference values of every loss, in extended precision, from the equations alone."""

from . import losses

ORACLES = {
    "Contrastive": losses.contrastive,
    "Margin": losses.margin,
    "BinomialDeviance": losses.binomial_deviance,
    "DroWorst": losses.dro_worst,
    "DroTopK": losses.dro_top_k,
    "DroTopKPN": losses.dro_top_k_pn,
    "DroKL": losses.dro_kl,
    "DroKLGrouped": losses.dro_kl_grouped,
    "DroChiSquare": losses.dro_chi_square,
    "LiftedStructure": losses.lifted_structure,
    "GeneralizedLifted": losses.generalized_lifted,
    "MultiSimilarity": losses.multi_similarity,
    "HAP2S": losses.hap2s,
    "Triplet": losses.triplet,
    "NPair": losses.n_pair,
    "Angular": losses.angular,
    "NTXent": losses.nt_xent,
    "SupCon": losses.sup_con,
    "ProxyNCA": losses.proxy_nca,
    "ProxyAnchor": losses.proxy_anchor,
    "Circle": losses.circle,
    "ArcFace": losses.arc_face,
}
