"""Functions on tensors: one operation of the forward pass per file.

Each file holds `NAME_reference`, the specification in plain PyTorch that reads like the formula,
and `NAME`, what the model calls. Functions take tensors and numbers, never a config, so that this
package can be used alone.

Dimension letters, here and wherever tensors are described:
    T tokens   D hidden size   H expert width   I expert intermediate size
    E experts  K experts per token   R routed rows   B sequences   V vocabulary
"""
