"""Static INT8 on ONNX graphs: what to quantise, what range its inputs have, and how it is written."""
