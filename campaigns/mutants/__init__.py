"""Wrong models, planted one at a time through the pass interface: `python -m campaigns.mutants`.

A *mutant* is a fault as small as a real bug's, with the gate that should catch it. `harness` plants one and says which gate caught
it, `controls` are harmless changes that no gate may catch, and every other file that `plant.table` names is a table of mutants.
"""
