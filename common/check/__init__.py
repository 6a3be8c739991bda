"""Look before you train: what the data, the model or the plan of a run will be, told in a terminal.

python -m common.check data --stage 1 --model_name_or_path MODEL --data_path FILE
"""
