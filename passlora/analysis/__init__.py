"""The report page, and the paper's tables and figures."""
