"""Rules between keys, a module a section of the configuration; core.config.checks lists them all."""
