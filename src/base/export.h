// Marks symbols that libumem.so exports to the bindings and to torch_ext.
#pragma once
#define UMEM_API __attribute__((visibility("default")))
