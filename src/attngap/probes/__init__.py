"""Small models trained on recall, copying, regression and text: where a mechanism falls short, in minutes on a CPU."""
