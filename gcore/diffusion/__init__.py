"""What engines and trainers of diffusion and flow models share: schedules, noise, and the networks that denoise."""
