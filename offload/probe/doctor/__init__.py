"""What on this machine prevents or slows training, with fixes; reports contain nothing private."""
