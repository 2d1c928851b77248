"""Static INT8: calibration inputs, activation ranges, and quantised graphs (ONNX and OpenVINO)."""
