"""Every architecture of transformers from a tiny config, plain against ours."""
