package unixrpc

import (
	"errors"
	"strings"

	"connectrpc.com/connect"
)

// Words is an error as people read it: without the transport's code in front of what a daemon said.
func Words(err error) string {
	var remote *connect.Error
	if !errors.As(err, &remote) || remote.Message() == "" {
		return err.Error()
	}
	return strings.Replace(err.Error(), remote.Error(), remote.Message(), 1)
}
