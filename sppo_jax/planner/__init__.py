"""From a config to a Plan: costs, memory, chunk lengths and offloading; plain Python."""
