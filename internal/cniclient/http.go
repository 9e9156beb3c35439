package cniclient

import (
	"strings"
	"syscall"
	"unsafe"
)

// timeout of a call in seconds, longer than every timeout of the agent. Tests set this variable by a linker flag.
var timeout = "60"

// The head of a request. exchange writes the content length over the zeros, right-aligned.
const (
	head    = "POST /cni HTTP/1.0\r\nHost: pilaster.local\r\nContent-Length: 00000000\r\n\r\n"
	maxHead = len(head)
)

// response is an HTTP response.
type response struct {
	status string
	exit   int // exit code of the plugin; -1 if there is none, and the server is not an agent
	body   string
}

// roundTrip sends the request by HTTP/1.0, in which the end of the connection ends the response. If roundTrip fails,
// why is the reason, and call the failed system call, if any.
func (c *Call) roundTrip(socket string) (r response, call, why string) {
	const stream = syscall.SOCK_STREAM | syscall.SOCK_CLOEXEC | syscall.SOCK_NONBLOCK
	s, _, err := c.Kernel(syscall.SYS_SOCKET, syscall.AF_UNIX, stream, 0, 0, 0, 0)
	if err != 0 {
		return r, "socket: ", c.describe(err)
	}
	r, call, why = c.exchange(s, socket)
	c.Kernel(syscall.SYS_CLOSE, s, 0, 0, 0, 0, 0)
	return r, call, why
}

func (c *Call) exchange(s uintptr, socket string) (r response, call, why string) {
	c.left = syscall.NsecToTimespec(int64(number(timeout)) * second)
	if err := c.connect(s, socket); err != 0 {
		return r, "connect: ", c.describe(err)
	}
	copy(c.request[:], head)
	for i, n := maxHead-len("\r\n\r\n")-1, c.end-maxHead; n > 0; i, n = i-1, n/10 {
		c.request[i] = '0' + byte(n%10)
	}
	if err := c.send(s, c.request[:c.end]); err != 0 {
		return r, "write: ", c.describe(err)
	}
	n, err := c.read(int(s), c.answer[:], &c.left)
	switch {
	case err != 0:
		return r, "read: ", c.describe(err)
	case n == len(c.answer):
		return r, "", "its response is longer than 1 MiB"
	}
	r, why = parseResponse(view(c.answer[:n]))
	return r, "read: ", why
}

func (c *Call) connect(s uintptr, socket string) syscall.Errno {
	c.address.Family = syscall.AF_UNIX
	for i := range len(socket) { // findSocket has checked the length
		c.address.Path[i] = int8(socket[i])
	}
	length := unsafe.Offsetof(c.address.Path) + uintptr(len(socket)) + 1
	for {
		_, _, err := c.Kernel(syscall.SYS_CONNECT, s, uintptr(unsafe.Pointer(&c.address)), length, 0, 0, 0)
		if err != syscall.EAGAIN {
			return err
		}
		// The queue of the agent's socket is full. No event says that it has room again, so connect polls.
		left := c.left.Nano()
		if left <= pause {
			return syscall.ETIMEDOUT
		}
		c.left = syscall.NsecToTimespec(pause)
		c.poll = pollFd{fd: -1} // only sleeps
		if err := c.await(&c.left); err != syscall.ETIMEDOUT {
			return err
		}
		c.left = syscall.NsecToTimespec(left - pause)
	}
}

// parseResponse parses an HTTP/1 response. If the response is invalid, why is the reason.
func parseResponse(text string) (r response, why string) {
	head, body, complete := strings.Cut(text, "\r\n\r\n")
	line, headers, _ := strings.Cut(head, "\r\n")
	version, rest, _ := strings.Cut(line, " ")
	status, _, _ := strings.Cut(rest, " ")
	if !complete || !strings.HasPrefix(version, "HTTP/1.") || len(status) != 3 {
		return r, "the response is not valid HTTP"
	}
	r = response{status: status, exit: -1, body: body}
	for headers != "" {
		line, headers, _ = strings.Cut(headers, "\r\n")
		name, value, _ := strings.Cut(line, ": ")
		switch name { // letter case as Go's server writes it
		case "Content-Length":
			if number(value) != len(body) {
				return r, "the response is incomplete"
			}
		case "Pilaster-Exit":
			if exit := number(value); exit <= 255 {
				r.exit = exit
			}
		}
	}
	return r, ""
}

// number parses a decimal number of at most nine digits. For other texts it returns -1.
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
