"""The policy lab: policies compared at equal cost, thresholds calibrated, profiles stored."""
