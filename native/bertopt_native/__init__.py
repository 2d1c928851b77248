"""BERT-family encoders on CPUs, in INT8 and bf16.

>>> bertopt_native.pack("model.bin", config, tensors, precision="int8")
>>> encoder = bertopt_native.Encoder("model.bin")
>>> encoder.run(ids, starts, output="mean", normalize=True)
"""

from bertopt_native._core import LAYOUT_VERSION, float_linear, isa, supported
from bertopt_native.comparison import compare
from bertopt_native.encoder import Encoder
from bertopt_native.errors import BadFile, Unsupported
from bertopt_native.packing import pack

__version__ = "0.1.0"
__all__ = ["LAYOUT_VERSION", "BadFile", "Encoder", "Unsupported", "__version__", "compare", "float_linear", "isa", "pack", "supported"]
