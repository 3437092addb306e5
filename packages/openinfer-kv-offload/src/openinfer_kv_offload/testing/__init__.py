"""For tests with or against the tiers: cases for the conformance kit, and a soak with faults and kills."""
