package unixrpc

import (
	"errors"
	"fmt"
	"testing"

	"connectrpc.com/connect"
)

func TestWords(t *testing.T) {
	remote := connect.NewError(connect.CodeUnavailable, errors.New("unavailable: the store is full"))
	for want, err := range map[string]error{
		"the disk is gone":                                       errors.New("the disk is gone"),
		"unavailable: the store is full":                         remote,
		"registering: unavailable: the store is full; try again": fmt.Errorf("registering: %w; try again", remote),
		"aborted": connect.NewError(connect.CodeAborted, nil),
	} {
		if got := Words(err); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
