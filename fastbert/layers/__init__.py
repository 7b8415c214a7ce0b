"""nn.Modules that hold weights and call ops; they never look at device, dtype or backend."""
