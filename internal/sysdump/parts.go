package sysdump

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"pilaster.io/pilaster/internal/unixrpc"
)

// object returns a part with a value as JSON. The value's type must have no secrets. If read returns a value and an
// error, the part has both.
func object[T any](name string, read func(context.Context) (T, error)) Part {
	return Part{name, func(ctx context.Context) ([]byte, error) {
		v, err := read(ctx)
		b, encoding := json.MarshalIndent(v, "", "  ")
		if encoding != nil || string(b) == "null" {
			return nil, errors.Join(err, encoding)
		}
		return append(b, '\n'), errors.Join(err, encoding)
	}}
}

// answer returns a part with the response of a daemon. The part fails if the response's type can contain a key.
func answer[Q, A any](name string, call func(context.Context, *connect.Request[Q]) (*connect.Response[A], error)) Part {
	return Part{name, func(ctx context.Context) ([]byte, error) {
		resp, err := call(ctx, connect.NewRequest(new(Q)))
		if err != nil {
			return nil, err
		}
		m, ok := any(resp.Msg).(proto.Message)
		if !ok || holdsBytes(m.ProtoReflect().Descriptor(), map[protoreflect.FullName]bool{}) {
			return nil, fmt.Errorf("%T may hold a key", resp.Msg)
		}
		return protojson.MarshalOptions{Multiline: true, EmitUnpopulated: true}.Marshal(m)
	}}
}

// addressBytes is the only field of type bytes in an answer that holds no key.
const addressBytes = protoreflect.FullName("pilaster.v1.OffloadedEndpoint.addresses")

// holdsBytes reports whether a message type, or a message type nested in it, has a field of type bytes. All keys have
// this type.
func holdsBytes(m protoreflect.MessageDescriptor, seen map[protoreflect.FullName]bool) bool {
	if seen[m.FullName()] {
		return false
	}
	seen[m.FullName()] = true
	for i := range m.Fields().Len() {
		f := m.Fields().Get(i)
		if f.FullName() == addressBytes {
			continue
		}
		if f.Kind() == protoreflect.BytesKind || f.Message() != nil && holdsBytes(f.Message(), seen) {
			return true
		}
	}
	return false
}

// page is a part with a page that a daemon serves on its socket.
func page(name, socket, path string) Part {
	return Part{name, func(ctx context.Context) ([]byte, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, unixrpc.URL+path, nil)
		if err != nil {
			return nil, err
		}
		resp, err := unixrpc.Client(socket).Do(req)
		if err != nil {
			return nil, errors.Unwrap(err) // without the URL, which is the same for all sockets
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if resp.StatusCode != http.StatusOK {
			err = errors.Join(err, errors.New(resp.Status))
		}
		return b, err
	}}
}

// command is a part with the output of a program.
func command(name string, argv ...string) Part {
	return Part{name, func(ctx context.Context) ([]byte, error) {
		var out, complaint bytes.Buffer
		cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
		cmd.Stdout, cmd.Stderr = &out, &complaint
		err := cmd.Run()
		if err != nil {
			err = fmt.Errorf("%s: %w %s", strings.Join(argv, " "), err, bytes.TrimSpace(complaint.Bytes()))
		}
		return out.Bytes(), err
	}}
}

// tailBytes is how much tail reads at most.
const tailBytes = 4 << 20

// tail is a part with the end of a file.
func tail(name, path string) Part {
	return Part{name, func(context.Context) ([]byte, error) {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			return nil, err
		}
		return io.ReadAll(io.NewSectionReader(f, max(0, info.Size()-tailBytes), tailBytes))
	}}
}
