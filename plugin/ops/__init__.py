"""The ops, one file each: public function, reference, fake, autograd, cost, samples."""
