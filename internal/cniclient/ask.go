package cniclient

import (
	"strings"
	"syscall"
	"unsafe"
)

// patience in seconds is more than the longest timeout of the agent. The linker sets it for tests.
var patience = "60"

// The head of a request stands before what is said, and its length is written into it from the right.
const (
	head    = "POST /cni HTTP/1.0\r\nHost: pilaster.local\r\nContent-Length: 00000000\r\n\r\n"
	maxHead = len(head)
)

// answer is what an HTTP server said.
type answer struct {
	status string
	exit   int // -1 if the answer has no exit code: then it is not from an agent
	body   string
}

// ask is one exchange of HTTP/1.0: the answer ends where the connection ends. If it fails it says which system call
// did, if it is one, and why.
func (c *Call) ask(socket string) (a answer, call, why string) {
	const stream = syscall.SOCK_STREAM | syscall.SOCK_CLOEXEC | syscall.SOCK_NONBLOCK
	s, _, err := c.Kernel(syscall.SYS_SOCKET, syscall.AF_UNIX, stream, 0, 0, 0, 0)
	if err != 0 {
		return a, "socket: ", c.describe(err)
	}
	a, call, why = c.exchange(s, socket)
	c.Kernel(syscall.SYS_CLOSE, s, 0, 0, 0, 0, 0)
	return a, call, why
}

func (c *Call) exchange(s uintptr, socket string) (a answer, call, why string) {
	c.left = syscall.NsecToTimespec(int64(number(patience)) * second)
	if err := c.connect(s, socket); err != 0 {
		return a, "connect: ", c.describe(err)
	}
	copy(c.said[:], head)
	for i, n := maxHead-len("\r\n\r\n")-1, c.end-maxHead; n > 0; i, n = i-1, n/10 {
		c.said[i] = '0' + byte(n%10)
	}
	if err := c.send(s, c.said[:c.end]); err != 0 {
		return a, "write: ", c.describe(err)
	}
	n, err := c.read(int(s), c.came[:], &c.left)
	switch {
	case err != 0:
		return a, "read: ", c.describe(err)
	case n == len(c.came):
		return a, "", "its answer is longer than 1 MiB"
	}
	a, why = understand(view(c.came[:n]))
	return a, "read: ", why
}

func (c *Call) connect(s uintptr, socket string) syscall.Errno {
	c.address.Family = syscall.AF_UNIX
	for i := range len(socket) { // findSocket has seen that there is room
		c.address.Path[i] = int8(socket[i])
	}
	length := unsafe.Offsetof(c.address.Path) + uintptr(len(socket)) + 1
	for {
		_, _, err := c.Kernel(syscall.SYS_CONNECT, s, uintptr(unsafe.Pointer(&c.address)), length, 0, 0, 0)
		if err != syscall.EAGAIN {
			return err
		}
		// As many wait already as the agent's socket lets, and no event tells when there are fewer.
		left := c.left.Nano()
		if left <= pause {
			return syscall.ETIMEDOUT
		}
		c.left = syscall.NsecToTimespec(pause)
		c.poll = pollFd{fd: -1} // none
		if err := c.await(&c.left); err != syscall.ETIMEDOUT {
			return err
		}
		c.left = syscall.NsecToTimespec(left - pause)
	}
}

// understand reads an HTTP/1 response, or says why it is none.
func understand(said string) (a answer, why string) {
	head, body, whole := strings.Cut(said, "\r\n\r\n")
	line, headers, _ := strings.Cut(head, "\r\n")
	version, rest, _ := strings.Cut(line, " ")
	status, _, _ := strings.Cut(rest, " ")
	if !whole || !strings.HasPrefix(version, "HTTP/1.") || len(status) != 3 {
		return a, "what came is not a whole answer of HTTP"
	}
	a = answer{status: status, exit: -1, body: body}
	for headers != "" {
		line, headers, _ = strings.Cut(headers, "\r\n")
		name, value, _ := strings.Cut(line, ": ")
		switch name { // as Go's server writes them
		case "Content-Length":
			if number(value) != len(body) {
				return a, "the answer was cut off"
			}
		case "Pilaster-Exit":
			if exit := number(value); exit <= 255 {
				a.exit = exit
			}
		}
	}
	return a, ""
}

// number is -1 for what is none, or is longer than anything here.
func number(text string) int {
	if text == "" || len(text) > 9 {
		return -1
	}
	n := 0
	for i := range len(text) {
		if text[i] < '0' || text[i] > '9' {
			return -1
		}
		n = 10*n + int(text[i]-'0')
	}
	return n
}
