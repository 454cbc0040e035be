// Marks what libumem.so offers to the bindings and to torch_ext.
#pragma once
#define UMEM_API __attribute__((visibility("default")))
