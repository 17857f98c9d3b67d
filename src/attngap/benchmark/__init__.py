"""Speed and memory of the ops against peers, as ratios within one run."""
