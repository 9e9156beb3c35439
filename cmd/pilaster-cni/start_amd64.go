//lint:file-ignore U1000 start_amd64.s and the linker name what is here

package main

import (
	"syscall"
	"unsafe"
)

// start is where the program begins if the linker is told so (-E main.start): without Go's runtime, whose threads, heap
// and signal handlers take ten times as long as all that this program does. It is Go that needs none of it (package
// plugin): a stack that does not grow, no memory but what stands in variables, system calls without the Go scheduler.
func start()

// goroutine is what compiled code looks for its stack's limit in; 0 lets it use all that the kernel gives.
var goroutine [64]uintptr

// begin gets the stack as the kernel has laid it out: the number of arguments, these, nil, the environment, nil.
func begin(stack unsafe.Pointer) {
	const word = unsafe.Sizeof(uintptr(0))
	arguments := *(*uintptr)(stack)
	for at := unsafe.Add(stack, (arguments+2)*word); *(**byte)(at) != nil; at = unsafe.Add(at, word) {
		variable, n := *(**byte)(at), 0
		for *(*byte)(unsafe.Add(unsafe.Pointer(variable), n)) != 0 {
			n++
		}
		call.Variable(unsafe.String(variable, n))
	}
	call.Kernel = syscall.RawSyscall6
	exit := run()
	syscall.RawSyscall(syscall.SYS_EXIT_GROUP, uintptr(exit), 0, 0)
}
