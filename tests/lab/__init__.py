"""The commands of scripts/, and what stands behind them in lab/."""
