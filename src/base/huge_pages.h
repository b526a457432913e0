#pragma once

// Memory for large arrays that are streamed through: from regions that ask the kernel for huge
// pages. A decode step reads every weight once; with pages of 4 KiB the walks of the page table
// (two levels of them in a virtual machine) cost half of the read bandwidth.

#include <cstddef>
#include <memory>

namespace tare {

// `bytes` (at least 1) aligned to 64, zero-filled, or null when memory is short. Arrays below 4 MiB
// share a region, which goes back to the system when the last of them is freed; use_count() is the
// array's own. Thread-safe. Where the kernel grants no huge pages it is ordinary memory.
std::shared_ptr<void> AllocateHuge(size_t bytes);

}  // namespace tare
