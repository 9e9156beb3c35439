package accelerate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"connectrpc.com/connect"

	"pilaster.io/pilaster/internal/unixrpc"
)

// Client calls the daemon on a socket.
type Client struct{ Socket string }

// Status returns the daemon's status.
func (c Client) Status(ctx context.Context) (s Status, err error) {
	err = c.do(ctx, http.MethodGet, pathStatus, nil, &s)
	return s, err
}

// Pause makes all packets take the overlay's way, until Resume.
func (c Client) Pause(ctx context.Context) (s Status, err error) {
	err = c.do(ctx, http.MethodPost, pathPause, nil, &s)
	return s, err
}

// Resume ends Pause.
func (c Client) Resume(ctx context.Context) (s Status, err error) {
	err = c.do(ctx, http.MethodPost, pathResume, nil, &s)
	return s, err
}

// Evict returns the number of evicted entries.
func (c Client) Evict(ctx context.Context, q EvictRequest) (n int, err error) {
	var e Evicted
	err = c.do(ctx, http.MethodPost, pathEvict, q, &e)
	return e.Entries, err
}

// Reset detaches everything, restores the settings and ends the daemon. Without a daemon, nothing is attached, and
// Reset restores the settings in the network namespace of the calling thread.
func (c Client) Reset(ctx context.Context) (undone []Setting, err error) {
	var u Undone
	err = c.do(ctx, http.MethodPost, pathReset, nil, &u)
	if !errors.Is(err, unixrpc.ErrNoListener) {
		return u.Settings, err
	}
	return restore(recordOf(c.Socket))
}

func (c Client) do(ctx context.Context, method, path string, question, answer any) error {
	body, err := json.Marshal(question)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, unixrpc.URL+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := unixrpc.Client(c.Socket).Do(req)
	if err != nil {
		return connect.NewError(connect.CodeUnavailable, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusOK {
		return json.NewDecoder(resp.Body).Decode(answer)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	if err != nil {
		return err
	}
	err = fmt.Errorf("%s", bytes.TrimSpace(text))
	switch resp.StatusCode {
	case http.StatusBadRequest:
		return connect.NewError(connect.CodeInvalidArgument, err)
	case http.StatusServiceUnavailable:
		return connect.NewError(connect.CodeUnavailable, err)
	}
	return err
}
