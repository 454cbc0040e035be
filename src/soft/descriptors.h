// Descriptors of files that programs do not know of.
#pragma once

namespace umem::soft {

// Moves a descriptor to a number that the kernel does not give out soon: a program that closes all
// of its descriptors, as daemons do, may then open others, and umem must not write to those.
// Returns `file` where that fails, and negative numbers.
int moved_up(int file);

}  // namespace umem::soft
