package plugin

import (
	"errors"
	"strconv"
	"strings"
	"syscall"
)

// patience in seconds is more than the agent itself waits for anybody.
const patience = 60

// answer is what an HTTP server said.
type answer struct {
	status string
	exit   int // -1 where it was not said, so that nobody but an agent is believed
	body   string
}

// failed is a system call that failed.
type failed struct {
	call string
	err  error
}

func (f *failed) Error() string { return f.call + ": " + f.err.Error() }

// again repeats a call that a signal interrupted: the runtime sends itself some.
func again(call func() (int, error)) (n int, err error) {
	for {
		if n, err = call(); err != syscall.EINTR {
			return n, err
		}
	}
}

// ask is one exchange of HTTP/1.0: the answer ends where the connection ends.
func ask(socket string, body []byte) (answer, error) {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return answer{}, &failed{"socket", err}
	}
	defer syscall.Close(fd)
	for _, direction := range []int{syscall.SO_SNDTIMEO, syscall.SO_RCVTIMEO} {
		if err := syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, direction, &syscall.Timeval{Sec: patience}); err != nil {
			return answer{}, &failed{"setsockopt", err}
		}
	}
	if _, err := again(func() (int, error) { return 0, syscall.Connect(fd, &syscall.SockaddrUnix{Name: socket}) }); err != nil {
		return answer{}, &failed{"connect", err}
	}
	head := "POST /cni HTTP/1.0\r\nHost: pilaster.local\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n"
	if err := Write(fd, append([]byte(head), body...)); err != nil {
		return answer{}, &failed{"write", err}
	}
	said, err := Read(fd)
	if err == syscall.EAGAIN {
		err = errors.New("nothing came for a minute")
	}
	if err != nil {
		return answer{}, &failed{"read", err}
	}
	return understand(string(said))
}

// understand reads an HTTP/1 response.
func understand(said string) (answer, error) {
	head, body, whole := strings.Cut(said, "\r\n\r\n")
	line, headers, _ := strings.Cut(head, "\r\n")
	version, rest, _ := strings.Cut(line, " ")
	status, _, _ := strings.Cut(rest, " ")
	if !whole || !strings.HasPrefix(version, "HTTP/1.") || len(status) != 3 {
		return answer{}, errors.New("what came is not a whole answer of HTTP")
	}
	a := answer{status: status, exit: -1, body: body}
	for headers != "" {
		line, headers, _ = strings.Cut(headers, "\r\n")
		name, value, _ := strings.Cut(line, ": ")
		switch name { // as Go's server writes them
		case "Content-Length":
			if value != strconv.Itoa(len(body)) {
				return answer{}, errors.New("the answer was cut off")
			}
		case "Pilaster-Exit":
			if exit, err := strconv.ParseUint(value, 10, 8); err == nil {
				a.exit = int(exit)
			}
		}
	}
	return a, nil
}

// Write writes all of it to an open file.
func Write(fd int, text []byte) error {
	for len(text) > 0 {
		n, err := again(func() (int, error) { return syscall.Write(fd, text) })
		if err != nil {
			return err
		}
		text = text[n:]
	}
	return nil
}

// Read reads an open file to its end.
func Read(fd int) ([]byte, error) {
	buffer, n := make([]byte, 4096), 0
	for {
		if n == len(buffer) {
			buffer = append(buffer, make([]byte, n)...)
		}
		more, err := again(func() (int, error) { return syscall.Read(fd, buffer[n:]) })
		if more <= 0 || err != nil {
			return buffer[:n], err
		}
		n += more
	}
}
