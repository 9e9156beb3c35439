//lint:file-ignore U1000 start_amd64.s and the linker refer to these names

package main

import (
	"syscall"
	"unsafe"
)

// start is the entry point of the program with the linker flag -E main.start. It does not start Go's runtime, whose
// threads, heap and signal handlers take ten times as long as the work of this program. Package cniclient needs none of
// them: the stack does not grow, all memory is in variables, and system calls bypass the Go scheduler.
func start()

// goroutine is where compiled code reads the limit of its stack. The limit 0 permits the whole stack of the kernel.
var goroutine [64]uintptr

// begin receives the stack in the layout of the kernel: number of arguments, arguments, nil, environment, nil.
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
