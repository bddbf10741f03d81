"""A federation's processes: certificates, node keys, and Flower's programs kept running."""
