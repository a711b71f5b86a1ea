"""What a layer has of the chunks before, other than a whole prefix: tails, and states."""
