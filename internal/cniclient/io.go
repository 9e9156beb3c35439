package cniclient

import (
	"syscall"
	"unsafe"
)

// Times in nanoseconds.
const (
	second = 1_000_000_000
	pause  = 10_000_000
)

// pollFd is the argument of ppoll.
type pollFd struct {
	fd              int32
	events, revents int16
}

const (
	pollIn  = 1
	pollOut = 4
)

// await waits for the events in c.poll, at most for left; nil means no timeout. The kernel subtracts the waiting time
// from left, also if a signal interrupts the wait, so signals do not prolong it.
func (c *Call) await(left *syscall.Timespec) syscall.Errno {
	for {
		n, _, err := c.Kernel(
			syscall.SYS_PPOLL,
			uintptr(unsafe.Pointer(&c.poll)),
			1,
			uintptr(unsafe.Pointer(left)),
			0,
			0,
			0,
		)
		switch {
		case err == syscall.EINTR:
		case err != 0:
			return err
		case n == 0:
			return syscall.ETIMEDOUT
		default:
			return 0
		}
	}
}

// mayRetry handles an error of a read or write. It returns 0 if the caller must repeat the read or write. EAGAIN occurs
// on the socket, and on files that the runtime has set to non-blocking.
func (c *Call) mayRetry(err syscall.Errno, fd int, event int16, left *syscall.Timespec) syscall.Errno {
	switch err {
	case syscall.EINTR:
		return 0
	case syscall.EAGAIN:
		c.poll = pollFd{fd: int32(fd), events: event}
		return c.await(left)
	}
	return err
}

// send writes all of text to a socket. If the agent has closed the connection, send returns EPIPE, without a SIGPIPE.
func (c *Call) send(s uintptr, text []byte) syscall.Errno {
	for len(text) > 0 {
		n, _, err := c.Kernel(
			syscall.SYS_SENDTO,
			s,
			uintptr(unsafe.Pointer(unsafe.SliceData(text))),
			uintptr(len(text)),
			syscall.MSG_NOSIGNAL,
			0,
			0,
		)
		if err != 0 {
			if err = c.mayRetry(err, int(s), pollOut, &c.left); err != 0 {
				return err
			}
			continue
		}
		text = text[n:]
	}
	return 0
}

// Write writes all of text to an open file, and reports whether it succeeded.
func (c *Call) Write(fd int, text string) bool {
	for len(text) > 0 {
		n, _, err := c.Kernel(
			syscall.SYS_WRITE,
			uintptr(fd),
			uintptr(unsafe.Pointer(unsafe.StringData(text))),
			uintptr(len(text)),
			0,
			0,
			0,
		)
		if err != 0 {
			if c.mayRetry(err, fd, pollOut, nil) != 0 {
				return false
			}
			continue
		}
		text = text[n:]
	}
	return true
}

// read reads an open file to its end, or until room is full.
func (c *Call) read(fd int, room []byte, left *syscall.Timespec) (n int, err syscall.Errno) {
	for n < len(room) {
		more, _, err := c.Kernel(
			syscall.SYS_READ,
			uintptr(fd),
			uintptr(unsafe.Pointer(&room[n])),
			uintptr(len(room)-n),
			0,
			0,
			0,
		)
		switch {
		case err != 0:
			if err = c.mayRetry(err, fd, pollIn, left); err != 0 {
				return n, err
			}
		case more == 0:
			return n, 0
		default:
			n += int(more)
		}
	}
	return n, 0
}
