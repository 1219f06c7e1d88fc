"""How an unchanged module becomes stages: blocks found and dealt out, stand-ins, what travels, a rehearsal of it."""
