"""What a checkpoint costs: training stopped, throughput lost, until it is durable, and reading it again."""
