// Package sdnotify sends a daemon's state to systemd (sd_notify(3)).
package sdnotify

import (
	"fmt"
	"net"
	"os"
	"strings"
)

// States understood by systemd; see sd_notify(3).
const (
	Ready    = "READY=1"
	Stopping = "STOPPING=1"
)

// Notify sends a state to the socket in the environment variable NOTIFY_SOCKET. Without the variable it does nothing.
func Notify(state string) error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	if rest, abstract := strings.CutPrefix(path, "@"); abstract {
		path = "\x00" + rest
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("send %s to the supervisor: %w", state, err)
	}
	defer c.Close()
	if _, err := c.Write([]byte(state)); err != nil {
		return fmt.Errorf("send %s to the supervisor: %w", state, err)
	}
	return nil
}
