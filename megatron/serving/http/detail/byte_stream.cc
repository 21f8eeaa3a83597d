#include "megatron/serving/http/detail/byte_stream.h"

#include <algorithm>
#include <array>

#include "megatron/base/check.h"

namespace megatron {
namespace {

namespace asio = boost::asio;
namespace ssl = boost::asio::ssl;
using asio::redirect_error;
using asio::use_awaitable;

constexpr size_t kReadBytes = 16 << 10;
constexpr size_t kTlsReadBytes = 4 << 10;  // held while a connection waits

class PlainStream final : public ByteStream {
 public:
  explicit PlainStream(TcpSocket socket) : socket_(std::move(socket)) {
    ErrorCode ignored;
    socket_.non_blocking(true, ignored);
  }
  asio::awaitable<ErrorCode> handshake() override { co_return ErrorCode(); }

  asio::awaitable<ErrorCode> read(std::string& out) override {
    // One buffer for each thread, used between two waits.
    thread_local std::array<char, kReadBytes> buffer;
    ErrorCode error;
    for (;;) {
      const size_t bytes = socket_.read_some(asio::buffer(buffer), error);
      if (error != asio::error::would_block && error != asio::error::try_again) {
        out.append(buffer.data(), bytes);
        co_return error;
      }
      error = {};
      co_await socket_.async_wait(TcpSocket::wait_read, redirect_error(use_awaitable, error));
      if (error) co_return error;
    }
  }

  asio::awaitable<ErrorCode> write(std::string_view bytes) override {
    ErrorCode error;
    co_await asio::async_write(socket_, asio::buffer(bytes.data(), bytes.size()),
                               redirect_error(use_awaitable, error));
    co_return error;
  }

  asio::awaitable<void> finish_writing() override {
    ErrorCode ignored;
    socket_.shutdown(TcpSocket::shutdown_send, ignored);
    co_return;
  }
  TcpSocket& socket() override { return socket_; }

 private:
  TcpSocket socket_;
};

class TlsStream final : public ByteStream {
 public:
  TlsStream(TcpSocket socket, ssl::context& context, const std::string* server_name)
      : stream_(std::move(socket), context), is_client_(server_name != nullptr) {
    if (!is_client_) return;
    SSL_set_tlsext_host_name(stream_.native_handle(), server_name->c_str());
    stream_.set_verify_mode(ssl::verify_peer);
    stream_.set_verify_callback(ssl::host_name_verification(*server_name));
  }
  asio::awaitable<ErrorCode> handshake() override {
    ErrorCode error;
    co_await stream_.async_handshake(
        is_client_ ? ssl::stream_base::client : ssl::stream_base::server,
        redirect_error(use_awaitable, error));
    co_return error;
  }
  asio::awaitable<ErrorCode> read(std::string& out) override {
    ErrorCode error;
    std::string buffer(kTlsReadBytes, '\0');
    const size_t bytes = co_await stream_.async_read_some(asio::buffer(buffer),
                                                          redirect_error(use_awaitable, error));
    out.append(buffer, 0, bytes);
    co_return error;
  }
  asio::awaitable<ErrorCode> write(std::string_view bytes) override {
    ErrorCode error;
    co_await asio::async_write(stream_, asio::buffer(bytes.data(), bytes.size()),
                               redirect_error(use_awaitable, error));
    co_return error;
  }
  asio::awaitable<void> finish_writing() override {
    ErrorCode ignored;
    SSL_shutdown(stream_.native_handle());  // the notice alone; nobody waits for the answer
    socket().shutdown(TcpSocket::shutdown_send, ignored);
    co_return;
  }
  TcpSocket& socket() override { return stream_.next_layer(); }

 private:
  ssl::stream<TcpSocket> stream_;
  bool is_client_;
};

}  // namespace

void ByteStream::cancel() {
  ErrorCode ignored;
  socket().cancel(ignored);
}

void ByteStream::close_now() {
  ErrorCode ignored;
  socket().close(ignored);
}

std::unique_ptr<ByteStream> make_plain_stream(TcpSocket socket) {
  return std::make_unique<PlainStream>(std::move(socket));
}

std::unique_ptr<ByteStream> make_tls_stream(TcpSocket socket, ssl::context& context,
                                            const std::string* server_name) {
  return std::make_unique<TlsStream>(std::move(socket), context, server_name);
}

std::shared_ptr<ssl::context> make_server_tls(const std::string& certificate_file,
                                              const std::string& key_file) {
  auto context = std::make_shared<ssl::context>(ssl::context::tls_server);
  SSL_CTX_set_min_proto_version(context->native_handle(), TLS1_2_VERSION);
  SSL_CTX_set_mode(context->native_handle(), SSL_MODE_RELEASE_BUFFERS);
  ErrorCode error;
  context->use_certificate_chain_file(certificate_file, error);
  MEGATRON_CHECK(!error, certificate_file, " holds no chain of certificates: ", error.message());
  context->use_private_key_file(key_file, ssl::context::pem, error);
  MEGATRON_CHECK(!error, key_file, " holds no private key for the certificate of ",
                 certificate_file, ": ", error.message());
  return context;
}

std::shared_ptr<ssl::context> make_client_tls(const std::string& ca_file) {
  auto context = std::make_shared<ssl::context>(ssl::context::tls_client);
  SSL_CTX_set_min_proto_version(context->native_handle(), TLS1_2_VERSION);
  ErrorCode error;
  if (ca_file.empty())
    context->set_default_verify_paths(error);
  else
    context->load_verify_file(ca_file, error);
  MEGATRON_CHECK(!error, ca_file.empty() ? "the system's certificates" : ca_file,
                 " cannot be read: ", error.message());
  return context;
}

}  // namespace megatron
