package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// process is a running process with a pidfd, so that a signal never reaches another process with a reused pid.
type process struct{ pid, fd int }

// openProcess opens a pidfd, then checks with is that the pid still belongs to the intended process.
func openProcess(pid int, is func() bool) (process, bool) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return process{}, false // has ended
	}
	if !is() {
		unix.Close(fd)
		return process{}, false
	}
	return process{pid, fd}, true
}

func (p process) close() { unix.Close(p.fd) }

func (p process) signal(s unix.Signal) error {
	if err := unix.PidfdSendSignal(p.fd, s, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal process %d: %w", p.pid, err)
	}
	return nil
}

// wait waits until the process ends.
func (p process) wait(ctx context.Context) error {
	for {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("process %d has not ended: %w", p.pid, context.Cause(ctx))
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}, 100)
		if n > 0 {
			return nil
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// end sends SIGTERM, and SIGKILL if the process has not ended after patience.
func (p process) end(ctx context.Context, patience time.Duration) error {
	if err := p.signal(unix.SIGTERM); err != nil {
		return err
	}
	short, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if p.wait(short) == nil {
		return nil
	}
	if err := p.signal(unix.SIGKILL); err != nil {
		return err
	}
	return p.wait(ctx)
}

// inside opens the processes in these network namespaces, given by inode, except this process.
func inside(namespaces map[uint64]bool) ([]process, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var found []process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		is := func() bool {
			var st unix.Stat_t
			err := unix.Stat(filepath.Join("/proc", e.Name(), "ns/net"), &st)
			return err == nil && namespaces[st.Ino]
		}
		if !is() {
			continue
		}
		if p, ok := openProcess(pid, is); ok {
			found = append(found, p)
		}
	}
	return found, nil
}
