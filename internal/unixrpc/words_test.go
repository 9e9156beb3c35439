package unixrpc

import (
	"errors"
	"fmt"
	"testing"

	"connectrpc.com/connect"
)

func TestWords(t *testing.T) {
	said := connect.NewError(connect.CodeUnavailable, errors.New("unavailable: the store is full"))
	for want, err := range map[string]error{
		"the disk is gone":                                       errors.New("the disk is gone"),
		"unavailable: the store is full":                         said,
		"registering: unavailable: the store is full; try again": fmt.Errorf("registering: %w; try again", said),
		"aborted": connect.NewError(connect.CodeAborted, nil),
	} {
		if got := Words(err); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
