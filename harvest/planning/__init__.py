"""What a job comes to before it runs: data, model, sizes, memory and time, judged without loading anything."""
