package cni

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/textproto"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
)

// callTimeout is longer than the agent itself waits for anybody.
const callTimeout = 60 * time.Second

// agent calls AgentService by Connect's unary protocol over HTTP/1.0 on the unix socket. net/http
// and connect would make the plugin 10 MB; this makes it 6.
type agent struct{ socket string }

// agentError is a refusal by the agent, with Connect's name of the code.
type agentError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

func (e *agentError) Error() string { return e.Message }

// unreachable means that no agent answered.
type unreachable struct{ err error }

func (u *unreachable) Error() string { return u.err.Error() }
func (u *unreachable) Unwrap() error { return u.err }

// call sends one request and reads the response into resp.
func (a agent) call(ctx context.Context, method string, req, resp proto.Message) error {
	body, err := proto.Marshal(req)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	status, answer, err := a.post(ctx, "/pilaster.v1.AgentService/"+method, body)
	if err != nil {
		return &unreachable{fmt.Errorf("the agent on %s does not answer: %w", a.socket, err)}
	}
	return a.understand(method, status, answer, resp)
}

// understand reads an answer into resp, or makes the error of it that it is.
func (a agent) understand(method string, status int, answer []byte, resp proto.Message) error {
	if status == 200 {
		return proto.Unmarshal(answer, resp)
	}
	refusal := &agentError{}
	if json.Unmarshal(answer, refusal) != nil || refusal.Code == "" {
		if status == 404 {
			return fmt.Errorf("the agent on %s does not know %s, so it is older than this plugin; nothing was changed; upgrade the agent", a.socket, method)
		}
		return fmt.Errorf("%s answers %s with HTTP status %d; is it Pilaster's agent?", a.socket, method, status)
	}
	refusal.Message = cmp.Or(refusal.Message, fmt.Sprintf("the agent on %s refuses %s without saying why (%s); its log may", a.socket, method, refusal.Code))
	return refusal
}

// post is one HTTP/1.0 exchange: the answer ends where the connection ends.
func (a agent) post(ctx context.Context, path string, body []byte) (status int, answer []byte, err error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", a.socket)
	if err != nil {
		return 0, nil, err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		conn.SetDeadline(deadline)
	}
	var request bytes.Buffer
	fmt.Fprintf(&request, "POST %s HTTP/1.0\r\nHost: pilaster.local\r\nContent-Type: application/proto\r\nConnect-Protocol-Version: 1\r\nContent-Length: %d\r\n\r\n", path, len(body))
	request.Write(body)
	if _, err := conn.Write(request.Bytes()); err != nil {
		return 0, nil, err
	}
	return readAnswer(conn)
}

// readAnswer reads an HTTP/1 response that ends where its connection ends.
func readAnswer(conn io.Reader) (status int, answer []byte, err error) {
	r := textproto.NewReader(bufio.NewReader(conn))
	line, err := r.ReadLine()
	if err != nil {
		return 0, nil, err
	}
	fields := strings.Fields(line)
	if len(fields) < 2 || !strings.HasPrefix(fields[0], "HTTP/1.") {
		return 0, nil, fmt.Errorf("%q is not an HTTP status line", line)
	}
	if status, err = strconv.Atoi(fields[1]); err != nil {
		return 0, nil, fmt.Errorf("%q is not an HTTP status line", line)
	}
	header, err := r.ReadMIMEHeader()
	if err != nil {
		return 0, nil, err
	}
	if answer, err = io.ReadAll(r.R); err != nil {
		return 0, nil, err
	}
	if want := header.Get("Content-Length"); want != "" && want != strconv.Itoa(len(answer)) {
		return 0, nil, errors.New("the answer was cut off")
	}
	return status, answer, nil
}
