"""Artefacts behind HTTP. One process, one event loop; batches are planned over the texts of all requests that wait."""
