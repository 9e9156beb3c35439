package sysdump

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// Messages with a field of type bytes are rejected, even if the field is empty.
func TestMessagesWithBytesAreRefused(t *testing.T) {
	ctx := t.Context()
	tenants := answer(
		"t",
		func(
			context.Context, *connect.Request[pilasterv1.ListTenantsRequest],
		) (*connect.Response[pilasterv1.ListTenantsResponse], error) {
			return connect.NewResponse(
				&pilasterv1.ListTenantsResponse{Tenants: []*pilasterv1.Tenant{{Name: "blue"}}},
			), nil
		},
	)
	if b, err := tenants.Collect(ctx); err == nil || len(b) > 0 || !strings.Contains(err.Error(), "may hold a key") {
		t.Errorf("tenants, whose keys are bytes: %q, %v; want only an error", b, err)
	}
	nodes := answer(
		"n",
		func(
			context.Context, *connect.Request[pilasterv1.ListNodesRequest],
		) (*connect.Response[pilasterv1.ListNodesResponse], error) {
			return connect.NewResponse(&pilasterv1.ListNodesResponse{Nodes: []*pilasterv1.Node{{Name: "n1"}}}), nil
		},
	)
	if b, err := nodes.Collect(ctx); err != nil || !strings.Contains(string(b), "n1") {
		t.Errorf("nodes: %q, %v; want n1", b, err)
	}
}

// An incomplete part is in the archive, and the index has the results of all parts.
func TestWrite(t *testing.T) {
	var b bytes.Buffer
	reported := 0
	_, err := Write(t.Context(), &b, "dump", []Part{
		object("half.json", func(context.Context) ([]int, error) {
			return []int{7}, errors.New("the rest is missing")
		}),
		object("none.json", func(context.Context) ([]int, error) { return nil, errors.New("all of it is missing") }),
		command("no.txt", "/nonexistent/program"),
		command("echo.txt", "echo", "hello"),
	}, func(Result) { reported++ })
	if err != nil || reported != 4 {
		t.Fatalf("%d results reported, want 4; %v", reported, err)
	}
	zip, err := gzip.NewReader(&b)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for archive := tar.NewReader(zip); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		content, _ := io.ReadAll(archive)
		files[h.Name] = string(content)
	}
	var index []Result
	if err := json.Unmarshal([]byte(files["dump/index.json"]), &index); err != nil || len(index) != 4 {
		t.Fatalf("index of 4 results: %v in %v", err, files)
	}
	delete(files, "dump/index.json")
	if want := "map[dump/echo.txt:hello\n dump/half.json:[\n  7\n]\n]"; fmt.Sprint(files) != want {
		t.Errorf("files %q, want %q", fmt.Sprint(files), want)
	}
	for i, says := range []string{"the rest is missing", "all of it is missing", "no such file", ""} {
		if says == "" != (index[i].Error == "") || !strings.Contains(index[i].Error, says) {
			t.Errorf("index: %+v, want error %q", index[i], says)
		}
	}
}
