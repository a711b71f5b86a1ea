"""What a scheduled HLO text says: its loops, products, copies and hops."""
