"""Wrong models, planted one at a time through the pass interface: `python -m campaigns.mutants`.

A *mutant* is a fault as small as a real bug's, with the gate that should catch it. `torch_forms`, `onnx_forms`,
`runtime` and `deeds` are the tables; `harness` plants one and says which gate caught it.
"""
