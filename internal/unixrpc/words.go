package unixrpc

import (
	"errors"
	"strings"

	"connectrpc.com/connect"
)

// Words returns the text of an error without the prefix of the RPC code before a daemon's message.
func Words(err error) string {
	var remote *connect.Error
	if !errors.As(err, &remote) || remote.Message() == "" {
		return err.Error()
	}
	return strings.Replace(err.Error(), remote.Error(), remote.Message(), 1)
}
