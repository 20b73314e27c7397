"""From a command line to a checked configuration: the only place, with the entry points, that knows Hydra and
OmegaConf."""
