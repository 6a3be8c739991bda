"""What stands above the steps and looks at them: plans, checks of data and models, reports, the machine."""
