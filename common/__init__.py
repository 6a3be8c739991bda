"""Code that the three steps share: models, data and ranks. It does not know which step is running."""

import logging

# On CPUs with AVX512-BF16, importing bitsandbytes (PEFT does) warns if the package `kernels` is missing.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
