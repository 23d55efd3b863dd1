"""Expert weights and their two GEMMs.

Every kind of experts has the same contract: it takes normed activations and finished routing,
stops after the second GEMM, and hands over rows that nobody has normed, weighted or summed yet.
"""
