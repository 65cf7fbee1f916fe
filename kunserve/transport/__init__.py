"""Moving messages and bytes between processes: control, activations, and bulk behind them."""
